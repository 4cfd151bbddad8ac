"""How to set a training: `recommend`, with Algorithm 3 (`doubling`) and its inputs; `sweep`."""
