"""How processes and clients talk. Enough, on this page, for a client in another language.

**Transport.** A zmq DEALER socket connected to the engine's front endpoint (`tandem serve` prints it;
`ipc://...` or `tcp://host:port`). Every message is exactly one zmq frame: no empty delimiter, no second
part. Its first byte is the protocol version, 1. The rest is one msgpack map. The key `t` names the
message, the other keys are its fields, in any order. A field at its default may be left out; an unknown
message or field, or a wrong type, is refused. All messages with their fields and defaults are in
`srt.wire.messages` and `srt.wire.params`; of these a client uses the FRONT ones only.

**Keys.** A front that other machines reach speaks CURVE: set `CURVE_SERVERKEY`, `CURVE_PUBLICKEY` and
`CURVE_SECRETKEY` to the `server`, `public` and `secret` of the file that `tandem keys FOLDER NAME` made
for this client, before connecting. With a wrong key, or none, nothing is ever answered.

**Hello.** First send `hello` with a `rid`; the answer is `welcome` (model, context_length, vocab_size,
...) or `refused`. A `rid` is any non-empty string of the client's own, unique among what it has open;
every reply names the rid it belongs to. Other clients may use the same ones.

**Generate.** `generate` with one of `prompt` (text), `token_ids`, `messages` (role and content). Replies
come as `outputs`, whose `items` each belong to one rid and one sample `index` (0 to n - 1):
- the first item of a request has `accepted` and `prompt_tokens` (and, with `echo`, the prompt);
- items carry `text` and `token_ids` to be appended; a character or a stop string is never cut in two;
- the last item of each sample has `finish`: reason `stop`, `length`, `abort` or `error`, the counts, and
  for `error` and `abort` a `failure`. Exactly one comes for each of the n samples. The prompt's tokens
  are counted on sample 0 only, so that the sum over samples is right. With `stream` false there is one
  item per sample.
Whatever was not accepted ends in one `refused` instead; a full queue may also show as `finish` items
with the failure `queue_full`. `refused` with `duplicate_request` is about the newcomer: the request
that already had the name goes on.

**Abort.** `abort` with a rid, or with none for all of them; it has no reply of its own, the open samples
end with the reason `abort`. A client that closes its socket, or does not read while 4,096 messages wait
for it, is aborted too.

**Errors.** A failure has `code` (stable; the list is in `srt.errors`), `message`, and sometimes `param`
(the field at fault) and `retry_after` (seconds). Bytes that are not a message are refused with
`protocol_error` under the rid they name, or the empty rid if none can be read.

**Pings.** While a client has requests open it hears `ping` about twice a second; it need not answer. A
client that hears nothing at all for some 20 seconds should give its requests up. If the engine behind
the front stops moving, the requests end with the failure `engine_dead`.

**Questions.** `tokenize`, `detokenize` and `ask` (topics: audit, config, flush_cache, health, metrics,
profile, request, requests) are answered by `tokenized`, `detokenized`, `answer`, or `refused`.

**An example in hex.** The client says hello as "1", then asks for two greedy tokens after "Hi" as "a":

    01 82 a1 74 a5 68 65 6c 6c 6f a3 72 69 64 a1 31

    01 de 00 04 a1 74 a8 67 65 6e 65 72 61 74 65 a3 72 69 64 a1 61
    a6 70 72 6f 6d 70 74 a2 48 69 a6 70 61 72 61 6d 73 de 00 02
    aa 6d 61 78 5f 74 6f 6b 65 6e 73 02
    ab 74 65 6d 70 65 72 61 74 75 72 65 cb 00 00 00 00 00 00 00 00

After the welcome, an item that accepts "a" and brings the token 5 with the text "!":

    01 82 a1 74 a7 6f 75 74 70 75 74 73 a5 69 74 65 6d 73 91 85 a3 72 69 64 a1 61
    a8 61 63 63 65 70 74 65 64 c3 ad 70 72 6f 6d 70 74 5f 74 6f 6b 65 6e 73 01
    a4 74 65 78 74 a1 21 a9 74 6f 6b 65 6e 5f 69 64 73 91 05

Or a refusal, with a second to wait:

    01 83 a1 74 a7 72 65 66 75 73 65 64 a3 72 69 64 a1 61 a7 66 61 69 6c 75 72 65 83
    a4 63 6f 64 65 aa 71 75 65 75 65 5f 66 75 6c 6c a7 6d 65 73 73 61 67 65 a4 66 75 6c 6c
    ab 72 65 74 72 79 5f 61 66 74 65 72 cb 3f f0 00 00 00 00 00 00
"""
