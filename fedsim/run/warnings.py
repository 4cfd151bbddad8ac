"""What a person should know of a run before it costs anything: not wrong, and hardly meant."""

from fedsim.config import Algorithm
from fedsim.data.dataset import Dataset
from fedsim.plan import Plan


def warnings_of(plan: Plan, data: Dataset, *, default_delta: bool = False) -> list[str]:
    """A line for each thing in a plan that will probably disappoint.

    Args: default_delta: delta was left to its default.
    """
    found = []
    users, noise = plan.num_users, plan.gradient_noise_multiplier
    if users == 1:
        found.append("there is one user, who has nobody to hide among")
    elif noise and plan.delta > 1 / users:
        found.append(
            f"delta={plan.delta:g} is above 1/{users}: to publish all that one of {users} users "
            f"wrote would be allowed; the default is {users**-1.1:.2g}"
        )
    elif noise and default_delta:
        found.append(
            f"delta={plan.delta:.2g} is the default, which is weak: times the number of users it "
            f"is {plan.delta * users:.2g}; for a release give one, such as --delta 1e-6"
        )
    if noise > plan.expected_count:
        unit = "examples" if plan.algorithm == Algorithm.ELS else "users"
        found.append(
            f"the noise of a step is {noise / plan.expected_count:.1f} times as large, in every "
            f"direction, as the gradient of {plan.expected_count} {unit} can be: expect nothing to "
            "be learnt without more of them in a step (--batch-size) or a larger epsilon"
        )
    if data.eval_users is None:
        found.append("no users are held out, so that there will be no eval loss")
    return found
