"""Language models: the transformer, pretrained models from files and the Hub, and LoRA.

`language_model` is the task of training a model; `families` maps the files of other architectures
to the transformer; `weights` reads and writes them and the files beside them; `frozen`
keeps weights beneath adapters in few bytes; `decoding` draws texts.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
