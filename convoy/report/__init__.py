"""Tables on the terminal, the HTML page of a run, and pictures of a step."""
