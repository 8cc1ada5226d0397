"""Where the parts of one tensor lie on the devices, and which transfers bring it from one layout to another."""
