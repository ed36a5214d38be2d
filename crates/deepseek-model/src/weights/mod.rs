//! Reads a checkpoint directory: safetensors shards, memory-mapped, dequantised in parallel.

/// Why a checkpoint is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {}
