"""What must be the same on every device, checked before anything depends on it."""

from convoy.comm.group import Group
from convoy.errors import MismatchError


def agree_on(group: Group, topic: str, text: str, otherwise: str) -> None:
    """Every device must come with the same text.

    Args:
        otherwise: what a device did whose text is not device 0's, e.g. "started with another plan".

    Raises:
        MismatchError: names the devices.
    """
    texts = group.agree(topic, text)
    strangers = [d for d, other in enumerate(texts) if other != texts[0]]
    if strangers:
        raise MismatchError(
            f"device{'s' * (len(strangers) > 1)} {', '.join(map(str, strangers))} {otherwise} than "
            f"device 0: start every device with the same script and options"
        )
