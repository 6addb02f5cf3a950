"""Several hosts of one call: which they are, how they meet at host 0's address, and what they tell each other."""
