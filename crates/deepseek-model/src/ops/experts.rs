//! Mixture of experts: each row's chosen experts and the shared one, summed.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{
    Act, cuda, f32s,
    fp::sigmoid,
    from_f32s,
    gemm::{Mat, Threads, matmul_nt},
    u32s,
    view::ROWS_PER_TASK,
};

/// The stacked matrices of a layer's routed experts.
#[derive(Debug, Clone)]
pub(crate) struct Experts {
    /// `[E, 2m, h]`: gate rows, then up rows.
    pub(crate) w13: Tensor,
    /// `[E, h, m]`.
    pub(crate) w2: Tensor,
    /// Clamp of gate and up; 0: none.
    pub(crate) limit: f64,
}

/// Rows one task takes through one expert: the products stay in cache, and a popular expert
/// still spreads over the pool.
const TILE: usize = 64;

/// One expert's share of a tile of (row, choice) pairs.
struct Job<'a> {
    expert: usize,
    /// Index into the flat `[rows · k]` list of choices.
    choices: &'a [u32],
}

/// The choices of a batch by expert, as [`routed_experts`] takes them.
#[derive(Debug)]
pub(crate) enum SortedChoices {
    /// Indices of the flat choices; equal experts in row order.
    Host(Vec<u32>),
    /// On a device.
    Device(cuda::SortedChoices),
}

/// Sorts the choices `ids` `[rows, k]` (u32) of the rows `x` `[rows, h]` by expert.
pub(crate) fn sort_choices(experts: &Experts, x: &Tensor, ids: &Tensor) -> Result<SortedChoices> {
    if x.device().is_cuda() {
        return cuda::sort_choices(experts, x, ids).map(SortedChoices::Device);
    }
    sort_by_expert(&u32s(ids)?, experts.w13.dim(0)?).map(SortedChoices::Host)
}

/// `shared[row] + Σ_k weight · expert_k(x[row])`, `[rows, h]`, summed in f32 in the order of the
/// choices, whatever the rest of the batch. The products themselves may sum in another order where
/// an expert has another number of rows, as `matmul_nt` says.
///
/// `x` and `shared` are `[rows, h]`, `ids` (u32) and `weights` are `[rows, k]`; `sorted` is what
/// [`sort_choices`] made of `x` and `ids`.
pub(crate) fn routed_experts(
    experts: &Experts,
    x: &Tensor,
    (ids, weights): (&Tensor, &Tensor),
    sorted: &SortedChoices,
    shared: &Tensor,
    act: Act,
) -> Result<Tensor> {
    let order = match sorted {
        SortedChoices::Device(sorted) => {
            return cuda::routed_experts(experts, x, (ids, weights), sorted, shared);
        }
        SortedChoices::Host(order) => order,
    };
    let (rows, h) = x.dims2()?;
    let (_, two_m, _) = experts.w13.dims3()?;
    let k = ids.dim(1)?;
    let (x, ids, weights, shared) = (f32s(x)?, u32s(ids)?, f32s(weights)?, f32s(shared)?);
    let (w13, w2) = (f32s(&experts.w13)?, f32s(&experts.w2)?);

    let jobs = jobs(order, &ids);
    let mut results = vec![0f32; rows * k * h]; // in sorted order
    let mut tiles = Vec::with_capacity(jobs.len());
    let mut rest = results.as_mut_slice();
    for job in &jobs {
        let (tile, tail) = rest.split_at_mut(job.choices.len() * h);
        tiles.push((job, tile));
        rest = tail;
    }
    let m = two_m / 2;
    tiles.into_par_iter().for_each(|(job, out)| {
        let n = job.choices.len();
        let mut input = Vec::with_capacity(n * h);
        for &choice in job.choices {
            let row = choice as usize / k;
            input.extend_from_slice(&x[row * h..(row + 1) * h]);
        }
        let mut hidden = vec![0f32; n * two_m];
        let w13 = &w13[job.expert * two_m * h..][..two_m * h];
        matmul_nt(
            &mut hidden,
            two_m,
            Mat::dense(&input, n, h),
            Mat::dense(w13, two_m, h),
            Threads::One,
        );
        act.store_all(&mut hidden);
        let mut product = vec![0f32; n * m];
        for (product, hidden) in product.chunks_exact_mut(m).zip(hidden.chunks_exact(two_m)) {
            swiglu_row(product, hidden, experts.limit as f32, act);
        }
        let w2 = &w2[job.expert * h * m..][..h * m];
        matmul_nt(
            out,
            h,
            Mat::dense(&product, n, m),
            Mat::dense(w2, h, m),
            Threads::One,
        );
        act.store_all(out);
    });

    let mut place = vec![0u32; rows * k];
    for (at, &choice) in order.iter().enumerate() {
        place[choice as usize] = at as u32;
    }
    let mut out = shared.to_vec();
    out.par_chunks_mut(h)
        .enumerate()
        .with_min_len(ROWS_PER_TASK)
        .for_each(|(row, out)| {
            for choice in row * k..(row + 1) * k {
                let result = &results[place[choice] as usize * h..][..h];
                for (out, y) in out.iter_mut().zip(result) {
                    *out += weights[choice] * y;
                }
            }
            act.store_all(out);
        });
    from_f32s(out, (rows, h))
}

/// Indices of the flat choices, by expert; equal experts in row order.
fn sort_by_expert(ids: &[u32], experts: usize) -> Result<Vec<u32>> {
    let mut starts = vec![0u32; experts + 1];
    for &e in ids {
        if e as usize >= experts {
            candle_core::bail!("expert {e} of {experts}");
        }
        starts[e as usize + 1] += 1;
    }
    for e in 0..experts {
        starts[e + 1] += starts[e];
    }
    let mut order = vec![0u32; ids.len()];
    for (choice, &e) in ids.iter().enumerate() {
        order[starts[e as usize] as usize] = choice as u32;
        starts[e as usize] += 1;
    }
    Ok(order)
}

fn jobs<'a>(order: &'a [u32], ids: &[u32]) -> Vec<Job<'a>> {
    let expert = |choice: u32| ids[choice as usize] as usize;
    order
        .chunk_by(|&a, &b| expert(a) == expert(b))
        .flat_map(|run| run.chunks(TILE))
        .map(|choices| Job {
            expert: expert(choices[0]),
            choices,
        })
        .collect()
}

/// `silu(gate) · up` with the clamps, `[rows, m]` from `[rows, 2m]` (gate, then up).
pub(crate) fn swiglu(hidden: &Tensor, limit: f64, act: Act) -> Result<Tensor> {
    if hidden.device().is_cuda() {
        return cuda::swiglu(hidden, limit);
    }
    let (rows, two_m) = hidden.dims2()?;
    let m = two_m / 2;
    let hidden = f32s(hidden)?;
    let mut out = vec![0f32; rows * m];
    out.par_chunks_mut(m)
        .zip(hidden.par_chunks(two_m))
        .with_min_len(ROWS_PER_TASK)
        .for_each(|(out, hidden)| swiglu_row(out, hidden, limit as f32, act));
    from_f32s(out, (rows, m))
}

/// The gate has an upper clamp only; `limit` 0 switches both clamps off.
fn swiglu_row(out: &mut [f32], hidden: &[f32], limit: f32, act: Act) {
    let limit = if limit > 0.0 { limit } else { f32::INFINITY };
    let (gate, up) = hidden.split_at(out.len());
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        // Not `f32::min`, which would make a number of NaN.
        let gate = if *gate > limit { limit } else { *gate };
        *out = act.store(gate * sigmoid(gate) * up.clamp(-limit, limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clamp may bound a number, not stand for one that is missing.
    #[test]
    fn a_gate_that_is_no_number_gives_none() {
        let mut out = [0.0; 3];
        for limit in [0.0, 10.0] {
            let hidden = [f32::NAN, 1.0, 1e30, 1.0, f32::NAN, 1.0];
            swiglu_row(&mut out, &hidden, limit, Act::F32);
            assert!(out[0].is_nan() && out[1].is_nan() && !out[2].is_nan());
        }
    }
}
