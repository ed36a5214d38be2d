//! The embedding, copied into every stream.

use candle_core::{Module, Result, Tensor};
use candle_nn::Embedding;

use super::cuda;

/// `[rows, n, h]`: of each token (u32 `[rows]`) its row of the table `[V, h]`, `n` times. On a device a token
/// that the table does not have gives zeros; the host refuses it.
pub(crate) fn embed(table: &Embedding, tokens: &Tensor, n: usize) -> Result<Tensor> {
    if tokens.device().is_cuda() {
        return cuda::embed(table.embeddings(), tokens, n);
    }
    let (rows, h) = (tokens.dims1()?, table.hidden_size());
    let x = table.forward(tokens)?.unsqueeze(1)?;
    x.broadcast_as((rows, n, h))?.contiguous()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_stream_starts_with_the_token_s_row() {
        let table = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap();
        let table = Embedding::new(table.reshape((4, 2)).unwrap(), 2);
        let tokens = Tensor::new(&[3u32, 0], &Device::Cpu).unwrap();
        let streams = embed(&table, &tokens, 2).unwrap();
        assert_eq!(
            streams.to_vec3::<f32>().unwrap(),
            [[[6.0, 7.0], [6.0, 7.0]], [[0.0, 1.0], [0.0, 1.0]]]
        );
    }
}
