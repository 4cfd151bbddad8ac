"""The classic mistakes of private training, as functions in the place of fedsim's own.

See `planting` for how they get there, and `table_mutations` for what notices them. Nothing here may
import fedsim before it is called, for it is read while fedsim is imported.
"""

from experiments.mistakes.chats import CHATS
from experiments.mistakes.claims import CLAIMS, COPIES
from experiments.mistakes.clipping import CLIPPING
from experiments.mistakes.noise import EVALUATIONS, NOISE_AND_SENSITIVITY
from experiments.mistakes.sampling import SAMPLING
from experiments.mistakes.segments import SEGMENT

MISTAKES = (*NOISE_AND_SENSITIVITY, *CLIPPING, *SAMPLING, *SEGMENT, *CLAIMS, *COPIES, *EVALUATIONS)
MISTAKES += CHATS
