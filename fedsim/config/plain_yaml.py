"""YAML of strangers and of settings: values as they are written, without aliases."""

from typing import Any


def yaml_tree(text: str) -> Any:
    """Parse YAML without aliases, by which a few lines stand for gigabytes.

    Returns: the root node; None if there is none.
    Raises: ValueError: it is no such YAML.
    """
    import yaml

    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise ValueError("expected values, found an alias (*name)")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
