"""`rankzero.track`: a run that a program of its own holds, or an adapter for a framework."""
