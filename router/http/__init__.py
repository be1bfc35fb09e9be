"""The HTTP door: OpenAI's API, the engines' load as JSON, and a playground for browsers.

The door is a client of the router it belongs to. Each HTTP request becomes
Generate calls over gRPC, on a Unix socket in a directory that only this process'
user can open (`link`), so that nothing is done twice: validation, tenants,
admission, deadlines, slow readers, metrics and traces are those of every gRPC
client, and the door can be no way around them. What it adds is translation:

- `schema`: what a request may say; anything else is refused by name.
- `chat`, `completions`: how the two APIs lay out answers; `answers` makes them.
- `errors`: gRPC statuses as HTTP statuses and OpenAI's error bodies.
- `app`: the routes; `server`: the listening socket and its life.

A message more costs some tens of microseconds; beside a model's step that is
little, and a client that minds speaks gRPC.
"""
