//! Events on their way to the clients. To wake a client takes longer than all that a model's thread does
//! between two steps, so a thread of its own does it.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};

use super::{Shared, StartError};
use crate::request::{RequestId, Told};

/// What one step of a model has to tell, in order.
pub(super) type Events = Vec<(RequestId, Told)>;

/// Deliver what comes until every sender is gone. The order is that of sending, over all models.
pub(super) fn start(shared: Arc<Shared>) -> Result<(Sender<Events>, JoinHandle<()>), StartError> {
    let (sender, receiver) = unbounded::<Events>();
    let body = move || {
        for (id, told) in receiver.iter().flatten() {
            shared.tell(id, told);
        }
    };
    let thread = std::thread::Builder::new().name("deliver".into()).spawn(body);
    Ok((sender, thread.map_err(|e| StartError::Delivery { message: e.to_string() })?))
}
