"""Imported first by every Python that a test starts: hide scikit-learn, which transformers imports for assisted
generation if it is installed, and which takes two seconds of CPU.
"""

import sys

sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
