"""Runs engines over the machines of a Ray cluster.

Ray places them, restarts them and adds and removes machines. This package only decides how many
engines there are (`autoscaler`). Each engine is a `replica`: a placement group with an actor for
each `rank`. A `directory` tells routers where they are.
"""
