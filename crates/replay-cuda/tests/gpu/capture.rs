//! Under stream capture, the operations record launches and nothing else.

use candle_core::{DType, Device, Tensor};
use replay_core::{GraphMode, Window};
use replay_cuda::{
    Among, Error, LayerQuery, ReplayRows, gather_rows, gather_rows_into, pad_rebuilt_slots_into,
    replay_rows_into, row_list, scatter_rows, scatter_rows_into, write_rows_into,
};

use crate::gpu::gpu;
use crate::hazards::n_nodes;
use crate::replay_rows::{Step, planner};
use crate::tensors::assert_same;

/// The buffers of a step on one device.
struct Buffers {
    step: Step,
    cached: Tensor,
    rows: ReplayRows,
    batch: Tensor,
    kept: Tensor,
    back: Tensor,
    written: Tensor,
}

/// All five operations in one graph: five nodes, launched on new inputs with new results.
#[test]
fn a_graph_follows_its_inputs() {
    let gpu = gpu();
    let device = &gpu.device;
    let planner = planner(replay_core::ReplayPolicy::PromptTail, 8, 2);
    let query = LayerQuery {
        planner: &planner,
        mode: GraphMode::None,
        layer: 1,
        among: Among::Batch,
    };
    let (n_batch, max_rows) = (48, 48);
    let steps: Vec<Step> = (1..6).map(|seed| Step::random(seed, 4, n_batch)).collect();

    let buffers = |step: &Step, device: &Device| Buffers {
        step: step.on(device),
        cached: step.slots.to_device(device).unwrap().copy().unwrap(),
        rows: ReplayRows::new(max_rows, 6, (DType::I64, DType::I64), device).unwrap(),
        batch: batch_of(n_batch, step).to_device(device).unwrap(),
        kept: Tensor::zeros((max_rows, 3), DType::F32, device).unwrap(),
        back: Tensor::ones((n_batch, 3), DType::F32, device).unwrap(),
        written: Tensor::ones((n_batch, 3), DType::F32, device).unwrap(),
    };
    let run = |b: &Buffers| {
        let step = b.step.batch();
        replay_rows_into(query, &step, &b.step.slots, &b.rows).unwrap();
        pad_rebuilt_slots_into(&step, Window::new(8).unwrap(), &[&b.cached]).unwrap();
        gather_rows_into(&[&b.batch], &b.rows.rows, &[&b.kept]).unwrap();
        scatter_rows_into(&[&b.kept], &b.rows.rows, &[&b.back]).unwrap();
        write_rows_into(&[&b.kept], &b.rows.rows, &[&b.written]).unwrap();
    };

    let on_gpu = buffers(&steps[0], device);
    let graph = gpu.capture(|| run(&on_gpu));
    assert_eq!(n_nodes(&graph), 5);
    for step in &steps {
        let new = buffers(step, device);
        on_gpu.step.assign(&new.step);
        for (to, from) in [
            (&on_gpu.cached, &new.cached),
            (&on_gpu.written, &new.written),
        ] {
            to.slice_set(from, 0, 0).unwrap();
        }
        on_gpu.batch.slice_set(&new.batch, 0, 0).unwrap();
        graph.launch().unwrap();
        gpu.synchronize();

        let on_cpu = buffers(step, &Device::Cpu);
        run(&on_cpu);
        assert_same(&on_gpu.rows.rows, &on_cpu.rows.rows, "rows");
        assert_same(&on_gpu.rows.slots, &on_cpu.rows.slots, "slots");
        assert_same(&on_gpu.cached, &on_cpu.cached, "cached slots");
        assert_same(&on_gpu.kept, &on_cpu.kept, "kept rows");
        assert_same(&on_gpu.back, &on_cpu.back, "scattered rows");
        assert_same(&on_gpu.written, &on_cpu.written, "written rows");
    }
}

/// A batch whose values tell rows and steps apart.
fn batch_of(n_batch: usize, step: &Step) -> Tensor {
    let first = step.seed as f32 * 1000.0;
    let values = Tensor::arange(first, first + (n_batch * 3) as f32, &Device::Cpu).unwrap();
    values.reshape((n_batch, 3)).unwrap()
}

/// A list on the host would have to be uploaded, and the graph would keep the host address.
#[test]
fn uploads_are_refused() {
    let gpu = gpu();
    let batch = Tensor::zeros((4, 2), DType::F32, &gpu.device).unwrap();
    let graph = gpu.capture(|| {
        for error in [
            gather_rows(&[&batch], &[1]).unwrap_err(),
            scatter_rows(&batch, &[0, 1, 2, 3], 9).unwrap_err(),
            row_list(&[1], 4, &gpu.device).unwrap_err(),
        ] {
            assert!(matches!(error, Error::UploadUnderCapture { .. }), "{error}");
        }
    });
    assert_eq!(n_nodes(&graph), 0);
}
