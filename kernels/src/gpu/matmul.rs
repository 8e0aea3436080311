//! Matrix products by cublasLt, with the fastest algorithm found by measuring.

use std::collections::HashMap;
use std::fmt;
use std::mem::zeroed;
use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::sys::{self, cudaDataType_t as DataType};

use super::descriptor::{Layout, Operation, Preference};
use super::error::blas;
use super::{Device, DevicePtr, Event, GpuError, Library, Stream, libraries};

/// Type of a product's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutType {
    Bf16,
    F32,
}

/// y\[rows, outputs\] = x\[rows, inputs\] · w\[outputs, inputs\]ᵀ, all row-major and dense; x and w in bf16,
/// summed in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmShape {
    pub rows: u32,
    pub outputs: u32,
    pub inputs: u32,
    pub out: OutType,
    /// Add to y instead of setting it.
    pub accumulate: bool,
}

impl fmt::Display for GemmShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, outputs, inputs, out, accumulate } = self;
        let assign = if *accumulate { "+=" } else { "=" };
        write!(f, "y[{rows}, {outputs}] ({out:?}) {assign} x[{rows}, {inputs}] w[{outputs}, {inputs}]")
    }
}

/// Where a product's matrices are, each aligned to 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    pub x: DevicePtr,
    pub w: DevicePtr,
    pub y: DevicePtr,
}

/// Algorithms that are measured.
const CANDIDATES: usize = 8;
/// Timed runs of each.
const RUNS: usize = 5;
/// Bytes; what cublasLt's fastest algorithms need.
const ALIGNMENT: u32 = 16;

/// A cublasLt handle with its plans. All work of one is for one stream: the workspace is shared.
#[derive(Debug)]
pub struct Matmul {
    device: Device,
    handle: sys::cublasLtHandle_t,
    workspace: DevicePtr,
    workspace_bytes: usize,
    plans: HashMap<GemmShape, Plan>,
}

// SAFETY: the handle and the descriptors may be used from any thread, one at a time.
unsafe impl Send for Matmul {}

impl Matmul {
    /// `workspace`: `bytes` (32 MiB is enough) that nothing else uses.
    pub fn new(device: &Device, workspace: DevicePtr, bytes: usize) -> Result<Self, GpuError> {
        libraries::require(Library::CublasLt)?;
        device.make_current()?;
        let mut handle = null_mut();
        // SAFETY: cublasLt is loaded; the pointer is to a local.
        blas("starting", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(Self { device: device.clone(), handle, workspace, workspace_bytes: bytes, plans: HashMap::new() })
    }

    /// Choose the algorithm for `shape`, unless that was done: the fastest of the heuristic's first ones on
    /// `operands`. Between the runs `flush` (an address and a size in bytes, more than the L2 cache) is
    /// overwritten, so that weights come from memory as in a step; size 0 measures in cache.
    ///
    /// # Safety
    /// Operands, workspace and `flush` are allocated and nothing else uses them meanwhile. y and `flush` are
    /// overwritten.
    pub unsafe fn plan(
        &mut self,
        stream: &Stream,
        shape: GemmShape,
        operands: Operands,
        flush: (DevicePtr, usize),
    ) -> Result<(), GpuError> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        aligned(&shape, &operands)?;
        let mut plan = Plan::new(&shape)?;
        let mut best = None;
        for algorithm in self.candidates(&plan)? {
            plan.algorithm = algorithm;
            // SAFETY: the caller's.
            match unsafe { self.measure(stream, &plan, operands, flush) } {
                Ok(ms) if best.is_none_or(|(least, _)| ms < least) => best = Some((ms, algorithm)),
                Ok(_) => (),
                Err(error) if error.is_fatal() => return Err(error),
                // The heuristic can offer what cannot run; the others are still good.
                Err(_) => (),
            }
        }
        let (_, algorithm) = best.ok_or(GpuError::NoAlgorithm { shape, workspace: self.workspace_bytes })?;
        plan.algorithm = algorithm;
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// Enqueue a planned product. It can be captured.
    ///
    /// # Safety
    /// Operands and workspace are allocated, and stay so while a graph that holds the product is launched.
    /// `stream` is the only one with work of `self` under way.
    pub unsafe fn run(&self, stream: &Stream, shape: &GemmShape, operands: Operands) -> Result<(), GpuError> {
        let plan = self.plans.get(shape).ok_or(GpuError::NotPlanned { shape: *shape })?;
        aligned(shape, &operands)?;
        // SAFETY: the caller's.
        unsafe { self.enqueue(stream, plan, operands) }
    }

    /// Median milliseconds of one run.
    unsafe fn measure(
        &self,
        stream: &Stream,
        plan: &Plan,
        operands: Operands,
        (flush, flush_bytes): (DevicePtr, usize),
    ) -> Result<f32, GpuError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let mut times = [0.0; RUNS];
        // SAFETY: the caller's.
        unsafe {
            // The first run loads the algorithm's kernel.
            self.enqueue(stream, plan, operands)?;
            for time in &mut times {
                if flush_bytes > 0 {
                    stream.fill_u8_async(flush, 0, flush_bytes)?;
                }
                start.record(stream)?;
                self.enqueue(stream, plan, operands)?;
                end.record(stream)?;
                end.synchronize()?;
                *time = Event::elapsed_ms(&start, &end)?;
            }
        }
        times.sort_by(f32::total_cmp);
        Ok(times[RUNS / 2])
    }

    unsafe fn enqueue(&self, stream: &Stream, plan: &Plan, operands: Operands) -> Result<(), GpuError> {
        let (alpha, beta) = (1.0f32, plan.beta);
        let Operands { x, w, y } = operands;
        // SAFETY: the descriptors live in the plan; alpha and beta are read before the call returns; the
        // addresses are the caller's.
        blas("multiplying", unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.operation.raw(),
                from_ref(&alpha).cast(),
                w.0 as *const _,
                plan.w.raw(),
                x.0 as *const _,
                plan.x.raw(),
                from_ref(&beta).cast(),
                y.0 as *const _,
                plan.y.raw(),
                y.0 as *mut _,
                plan.y.raw(),
                &plan.algorithm,
                self.workspace.0 as *mut _,
                self.workspace_bytes,
                stream.raw().cast(),
            )
        })
    }

    fn candidates(&self, plan: &Plan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, GpuError> {
        let preference = Preference::new(self.workspace_bytes, ALIGNMENT)?;
        // SAFETY: plain data, for which zero bytes are a value (status 0 is success).
        let mut results: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { zeroed() };
        let mut count = 0;
        // SAFETY: the descriptors live; at most `CANDIDATES` results are written.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.operation.raw(),
                plan.w.raw(),
                plan.x.raw(),
                plan.y.raw(),
                plan.y.raw(),
                preference.raw(),
                CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut count,
            )
        };
        if code == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        blas("asking for algorithms", code)?;
        let good = |result: &&sys::cublasLtMatmulHeuristicResult_t| {
            result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= self.workspace_bytes
        };
        Ok(results[..count as usize].iter().filter(good).map(|result| result.algo).collect())
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: made in `new`, destroyed once. A failure leaves nothing to do.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

fn aligned(shape: &GemmShape, operands: &Operands) -> Result<(), GpuError> {
    let bad = [("x", operands.x), ("w", operands.w), ("y", operands.y)]
        .into_iter()
        .find(|(_, address)| !address.0.is_multiple_of(u64::from(ALIGNMENT)));
    bad.map_or(Ok(()), |(operand, address)| Err(GpuError::Misaligned { shape: *shape, operand, address: address.0 }))
}

/// A product as cublasLt knows it. It is column-major: w is \[inputs, outputs\], x is \[inputs, rows\], and
/// y\[outputs, rows\] = wᵀ · x.
#[derive(Debug)]
struct Plan {
    operation: Operation,
    w: Layout,
    x: Layout,
    y: Layout,
    beta: f32,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new(shape: &GemmShape) -> Result<Self, GpuError> {
        let (rows, outputs, inputs) = (shape.rows.into(), shape.outputs.into(), shape.inputs.into());
        let out = match shape.out {
            OutType::Bf16 => DataType::CUDA_R_16BF,
            OutType::F32 => DataType::CUDA_R_32F,
        };
        Ok(Self {
            operation: Operation::new()?,
            w: Layout::new(DataType::CUDA_R_16BF, inputs, outputs)?,
            x: Layout::new(DataType::CUDA_R_16BF, inputs, rows)?,
            y: Layout::new(out, outputs, rows)?,
            beta: if shape.accumulate { 1.0 } else { 0.0 },
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }
}
