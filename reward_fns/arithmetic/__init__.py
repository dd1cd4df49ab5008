"""Reads the equalities that a text writes down and judges them in exact arithmetic."""

from reward_fns.arithmetic.equalities import Equality, check_step, find_equalities

__all__ = ["Equality", "check_step", "find_equalities"]
