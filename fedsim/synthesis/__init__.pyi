from .synthesize import synthesize as synthesize
