"""A run: its directory, the files in it, and what it is started from.

directory     settings and plan in config.json, the lock, who owns the files
ledger        chained logs, and the ledger of what was released, by which epsilon is computed
checkpoint    the state between two steps, from which a run resumes, and its file in safetensors
metrics       metrics.jsonl, and which metrics may leave the machine
formats       pydantic types and JSON Schemas of plan, ledger and summary
model_source  the model that a run starts from, and the task that it trains
console       plan, progress and results of a run for a person; the table of runs
terminal      lines on stderr
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
