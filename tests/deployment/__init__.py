"""How Octavo is deployed and watched: docker/ and deploy/."""
