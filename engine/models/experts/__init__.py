"""Mixtures of experts: all experts of a layer in one operator."""
