"""What torchrun starts: worker processes. Commands name these modules as strings; nothing else imports them."""
