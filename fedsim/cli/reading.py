"""What a command that takes a run's settings says before it reads anything."""

from fedsim.config import RunConfig


class ReadsSources:
    """A command with the settings of a run."""

    run: RunConfig

    @property
    def doing(self) -> str:
        """The command's first line."""
        return f"reading data={self.run.data.source}, model={self.run.model.source}"
