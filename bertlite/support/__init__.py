"""Tools that the other rooms share; nothing here knows of BERT.

records        files written atomically; records of runs
progress       bars of long work
timing         candidates timed in turn
rows           rows of csv, tsv, jsonl, Parquet and text files, read strictly
batching       batches by tokens
extras         optional packages
torch_private  private names of torch, each with a fallback
"""
