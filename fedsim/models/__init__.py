"""Language models: the transformer, pretrained ones from files and hubs, and LoRA.

`language_model` is the task of training one; `families` maps other architectures' files to the
transformer, `pretrained` and `gguf_files` read them, `tensor_files` reads and writes safetensors.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
