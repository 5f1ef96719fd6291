"""The fair race: equal wall clock, learning rate decayed to zero in every arm, the IL paid for."""
