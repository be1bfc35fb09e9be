"""The names of draft methods: settings need them without their code."""

METHOD_TEXTS = {
    "ngram": "what followed the same tokens in the request's prompt or output",
    "suffix": "what most often followed them there or in earlier outputs",
    "draft": "what the model of --draft-model draws",
}
"""Description of each method's drafts."""
