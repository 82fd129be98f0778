"""Further drafters, with the contract of the others; the gate does not test them."""
