#!/usr/bin/env bash
# transformers 5.23.0: a pair of texts through tokenizers of models that tell its two texts apart.
#
# A good guess: what the tokenizer returns has token_type_ids, 1 for the second text, since the model has an embedding
# for them and the tokenizer's template knows them.
#
# What it is: BERT's returns them. Those of ALBERT, Funnel and XLNet know them and keep them back until they are asked for
# by return_token_type_ids=True. A pair that is handed on as it comes is read as one text.
set -euo pipefail
expected='BertTokenizer: returned [0, 0, 0, 1, 1], when asked for [0, 0, 0, 1, 1]
AlbertTokenizer: returned None, when asked for [0, 0, 0, 1, 1]
FunnelTokenizer: returned None, when asked for [2, 0, 0, 1, 1]
XLNetTokenizer: returned None, when asked for [0, 0, 1, 1, 2]'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "transformers==5.23.0" "tokenizers==0.23.3"

cat > "$place/try.py" <<'PYTHON'
import transformers as hf

pieces = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]", "<cls>", "<sep>", "<pad>", "<unk>", "<mask>", "<s>", "</s>"]
words = {piece: place for place, piece in enumerate([*pieces, "a", "b"])}
scores = [(piece, 0.0) for piece in [*pieces, "\u2581a", "\u2581b"]]
for kind, vocab in (
    (hf.BertTokenizer, words),
    (hf.AlbertTokenizer, scores),
    (hf.FunnelTokenizer, words),
    (hf.XLNetTokenizer, scores),
):
    tokenizer = kind(vocab=vocab)
    returned = dict(tokenizer("a", "b")).get("token_type_ids")
    asked_for = tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"]
    print(f"{kind.__name__}: returned {returned}, when asked for {asked_for}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
