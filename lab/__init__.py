"""Research around Convoy: not installed, not part of its promises."""
