"""Import what tokenizing processes need, before they are forked: their fork server loads this module.

No process of a run imports it: it keeps torch away from transformers' tokenizers.
"""

import transformers.utils
from transformers.utils import import_utils

# The module of tokenizers would import torch, to read weights in GGUF files: seconds, and memory, for nothing.
found = import_utils.is_torch_available
transformers.utils.is_torch_available = import_utils.is_torch_available = lambda: False
import transformers.tokenization_utils_tokenizers  # noqa: E402

# A rule of a user's own may import torch, and then expects transformers with it.
transformers.utils.is_torch_available = import_utils.is_torch_available = found

import sftkit.data.tokens.batch  # noqa: E402
import sftkit.data.tokens.processes  # noqa: E402, F401
from sftkit.runtime.signals import ignore_signals  # noqa: E402

# A signal to the process group would end the server, and its forks would become orphans.
ignore_signals()
