"""Predictions of load and compute times, and the choice between loading and computing."""
