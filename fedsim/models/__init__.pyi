from . import (
    frozen as frozen,
    lora as lora,
    peft_files as peft_files,
    weights as weights,
)
from .decoding import Decoder as Decoder, Prompt as Prompt, key_of as key_of
from .language_model import LanguageModelTask as LanguageModelTask, lengths_up_to as lengths_up_to
from .transformer import (
    BLOCKS as BLOCKS,
    PRESETS as PRESETS,
    Lora as Lora,
    Transformer as Transformer,
    TransformerConfig as TransformerConfig,
    preset as preset,
    stacked as stacked,
    unstacked as unstacked,
)
from .weights import HUB as HUB, TOKENIZER as TOKENIZER, Pretrained as Pretrained
