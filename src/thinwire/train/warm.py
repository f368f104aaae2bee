"""Imported once by the fork server, so that workers start with everything that a default job needs."""

import torch.distributed.checkpoint
import torch.nn.parallel
import torch.utils.tensorboard  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
