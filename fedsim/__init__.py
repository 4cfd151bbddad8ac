"""fedsim: fine-tune language models on people's text with user-level differential privacy.

The two algorithms of Charles et al. 2024 are `els` and `uls`; read them first. What they share:

    config, plan        what a run is told, and the public constants that follow from it
    keys, sampling      secret randomness without state; who takes part in a step
    clipping, mechanism the clipped sum with its sensitivity; noise on it, division by B or M
    accounting          epsilon, delta and calibration, by way of mixture (the loss of one step),
                        composition (of many), refinement (of their grid) and calibration
    group_privacy       the black-box baseline that the accountant is compared with
    train, evaluate     the loop around a step; held-out loss
    engine              where gradients are computed: this process, or a pool of Ray actors
    data, models        users' tokenised text; the transformer
    ledger, checkpoint, metrics, rundir   what a run leaves behind
    verify (evidence, replay), report (claim), audit   why anyone should believe it
    cli, arguments, console               what a person types and sees
    variance            Section 3 of the paper
"""
