"""HTTP: OpenAI's API, the engines' load as JSON, and a playground for browsers.

HTTP requests take the same path as gRPC calls, through `Generator.generate` and the same
authenticator: validation, quotas, admission, deadlines, slow readers, metrics and traces are the
same. This package only translates:

- `schema`: request schemas; unsupported arguments are rejected by name.
- `chat`, `completions`: the two APIs' response formats; `answers` builds the responses.
- `errors`: maps gRPC statuses to HTTP statuses and OpenAI's error bodies.
- `app`: the routes; `server`: the listening socket.
"""
