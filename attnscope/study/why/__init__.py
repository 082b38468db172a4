"""Why a head looks where it looks: a logit taken apart by what wrote the residual that its key and query are made of."""
