from .data_set import synthesize as synthesize
