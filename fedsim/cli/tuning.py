"""Commands that choose settings: `fedsim recommend` before a training, `fedsim select` by several
of them."""

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedsim.cli import Answer
from fedsim.config import (
    DataConfig,
    EngineConfig,
    MechanismConfig,
    ModelConfig,
    Positional,
    PrivacyConfig,
    PrivacyTarget,
    RunConfig,
    UpdateConfig,
    read,
)
from fedsim.errors import expect
from fedsim.run import Terminal


def recommend(
    target: PrivacyTarget,
    mechanism: MechanismConfig,
    data: DataConfig,
    model: ModelConfig,
    update: UpdateConfig,
    engine: EngineConfig,
    run_dir: Path = Path("runs"),
    users: int | None = None,
) -> Answer:
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    Takes flags of train, which the printed commands repeat. It looks at the data without
    protection, and says at what.

    Args:
      run_dir: Directory of the runs of the printed commands.
      users: Number of users whose gradients are measured. >= 1. Default: 128; 16 for a pretrained
        model.
    """
    Terminal().note(f"reading data={data.source}")
    from fedsim.engine import set_threads

    privacy = PrivacyConfig(**vars(target), **vars(mechanism))
    run = RunConfig(data=data, model=model, engine=engine, run_dir=run_dir, **vars(update))
    set_threads(engine)
    from fedsim import tuning
    from fedsim.run import Console

    result = tuning.recommend(privacy, run, Console(), num_users=users)
    return result, [tuning.report(result)]


def select(
    file: Positional[Path],
    out: Path,
    trials: Annotated[float, Field(ge=1, lt=math.inf)] | None = None,
    public_eval: bool = False,
) -> Answer:
    """Train some of several candidate settings, keep the best model, and pay for the choice alone.

    Private selection (Papernot and Steinke 2022): the number of trials is random and secret, each
    trial draws its settings at random, and only the best by the loss on held-out users is kept, in
    best/. A selection that was killed resumes with the same command.

    Args:
      out: Directory for the selection.
      file: TOML, YAML or JSON file with settings of train for all candidates. [grid] has lists of
        values: each combination is a candidate. [[runs]] have settings that go together; each is
        combined with the grid.
      trials: Expected number of trials. >= 1. Default: the number of candidates.
      public_eval: Required: held-out users are evaluated without noise, so their texts must be
        public.
    """
    Terminal().note(f"preparing the candidates of {out}")
    from fedsim import tuning
    from fedsim.engine import set_threads

    settings = tuning.expand(read(file))
    jobs = tuning.jobs_of(settings, out)
    only = "true: held-out users are evaluated without noise, so their texts must be public"
    expect("public_eval", public_eval, public_eval, only)
    set_threads(jobs[0].run.engine)
    from fedsim.run import Console

    result = tuning.select(settings, out, Console(), mean=trials)
    return result, [result["claim"], f"the best one: {result['best']}"]
