"""Mathematics, in one turn or with second thoughts."""
