"""HTTP: OpenAI's API, the engines' load as JSON, and a playground for browsers.

Each HTTP request becomes calls of `Generator.generate`, as gRPC calls do: validation, quotas,
admission, deadlines, slow readers, metrics and traces are the same. Callers are authenticated by
the same function. This package only translates:

- `schema`: the arguments of a request; any other is refused by name.
- `chat`, `completions`: the forms of the two APIs' answers; `answers` makes them.
- `errors`: gRPC statuses as HTTP statuses and OpenAI's error bodies.
- `app`: the routes; `server`: the listening socket.
"""
