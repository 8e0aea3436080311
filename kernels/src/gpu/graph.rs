//! Recording a stream's work once and launching it as one.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::error::driver;
use super::{Device, GpuError, Stream};

/// Recorded work, ready to launch.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    exec: sys::CUgraphExec,
    nodes: usize,
}

// SAFETY: a graph may be launched from any thread, one at a time; `launch` and `upload` only read the handle.
unsafe impl Send for Graph {}

impl Stream {
    /// Record what `work` enqueues on this stream instead of running it. Other threads stay free to
    /// allocate meanwhile; `work` must not allocate or synchronize. Whatever happens inside, the stream
    /// records no longer afterwards.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), GpuError>) -> Result<Graph, GpuError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        driver("beginning a capture", unsafe { sys::cuStreamBeginCapture_v2(self.raw(), mode) })?;
        let mut recording = Recording { stream: self, open: true, graph: null_mut() };
        work()?;
        recording.end()?;
        let (mut exec, mut nodes) = (null_mut(), 0);
        // SAFETY: the graph was just recorded and lives until `recording` is dropped.
        unsafe {
            driver("counting nodes", sys::cuGraphGetNodes(recording.graph, null_mut(), &mut nodes))?;
            driver("instantiating a graph", sys::cuGraphInstantiateWithFlags(&mut exec, recording.graph, 0))?;
        }
        Ok(Graph { device: self.device().clone(), exec, nodes })
    }
}

/// A capture under way, then the graph that came of it.
struct Recording<'a> {
    stream: &'a Stream,
    open: bool,
    graph: sys::CUgraph,
}

impl Recording<'_> {
    fn end(&mut self) -> Result<(), GpuError> {
        self.open = false;
        // SAFETY: the capture began on this stream and thread.
        driver("ending a capture", unsafe { sys::cuStreamEndCapture(self.stream.raw(), &mut self.graph) })
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.open {
            // `work` failed or panicked: that is the error to tell.
            let _ = self.end();
        }
        if !self.graph.is_null() {
            // SAFETY: owned here; an instantiated graph does not need it.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

impl Graph {
    /// Enqueue the whole.
    ///
    /// # Safety
    /// All addresses in the recorded work are still good. It does not run while it is launched on another
    /// stream.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: both live; the rest is the caller's.
        driver("launching a graph", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }

    /// Move it to the device now, so that the first launch costs what the others do.
    pub fn upload(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: both live.
        driver("uploading a graph", unsafe { sys::cuGraphUpload(self.exec, stream.raw()) })
    }

    /// How many kernels, copies and fills were recorded.
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: made in `capture`, destroyed once; a launch under way goes on. A failure leaves nothing to do.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
