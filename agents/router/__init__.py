"""The router's side of the control topic: which weights hold now, and who may raise them."""
