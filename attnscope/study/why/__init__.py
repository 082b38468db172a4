"""Why a head looks where it looks: a logit taken apart by what wrote the residual of its key and of its query."""
