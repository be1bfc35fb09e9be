"""Images in prompts: fetched, checked, decoded, and made what vision encoders take."""
