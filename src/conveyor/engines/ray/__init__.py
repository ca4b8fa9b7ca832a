"""Actors as processes that Ray starts: placement, resources and the failure of nodes are Ray's."""
