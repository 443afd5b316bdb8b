"""What carries decisions out: flights, the waiting room, the control loop and swaps, composed by `Fleet`."""
