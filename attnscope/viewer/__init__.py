"""The page: what was observed as one HTML file that needs no network, drawn by the scripts under `src/`.

    page_of([Side(seen)], Plan(), About()).save("bank.html")

`plan` says what fits, `side` takes an observation apart, `pack` makes bytes of weights, `page` the
document. `src/` is bundled into bundle.js and bundle.css by `npm run build`.
"""
