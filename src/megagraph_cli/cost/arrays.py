"""Types of the cost model's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Regressors = dict[str, Any]
"""Values by coefficient name; numbers, or arrays over the number of layers."""
