//! Whether what a step of a pipeline may take from another one is still in the store.

use agent_cas::gc::{Holder, Pin};

use super::Services;

impl Services {
    /// Looks at each step that the queue asks about, until that has ended. What is there is kept until the record of the
    /// pipeline names it.
    pub(crate) async fn check_reuse(&self) {
        let mut candidates = self.queue.reuse_candidates();
        while candidates.changed().await.is_ok() {
            let asked = candidates.borrow_and_update().clone();
            for (step, roots) in asked {
                let pins = roots.iter().map(|root| Pin::tree(*root, Holder::Jobs)).collect();
                let _relied = self.collector.rely_on(pins).await;
                let is_whole = match self.first_missing(&roots).await {
                    Ok(missing) => missing.is_none(),
                    Err(error) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(%step, error, "cannot look for what another step left: running it");
                        false
                    }
                };
                if self.queue.reuse_checked(step, is_whole).await.is_err() {
                    return; // it has ended
                }
            }
        }
    }
}
