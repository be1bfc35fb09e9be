"""Tests of docker/ and deploy/."""
