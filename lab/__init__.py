"""Research beside the package: nothing in Convoy imports it."""
