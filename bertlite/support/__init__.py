"""Tools that the other rooms share; nothing here knows of BERT.

files          files written atomically, hashes, the lock of a folder
environment    the commit, the versions and the machine of a record
runs           folders of experiments
memory         the memory of this process
progress       bars of long work
timing         candidates timed in turn
rows           rows of csv, tsv, jsonl, Parquet and text files, read strictly
batching       batches by tokens
extras         optional packages
torch_private  private names of torch, each with a fallback
"""
